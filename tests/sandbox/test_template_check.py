"""Images and runtimes are tried before a run needs them, and what is wrong with them is said in words."""

import io
import tarfile
import uuid
from contextlib import asynccontextmanager, suppress

import pytest

from sandfleet.fleet.host.base_image import VERSION_LABEL
from sandfleet.fleet.host.engine import Engine, EngineError
from sandfleet.fleet.host.template_check import refusals
from sandfleet.fleet.sandbox.client import SandboxClient
from sandfleet.fleet.sandbox.errors import TemplateUnavailable
from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import DEFAULT, read_templates
from tests.fixtures_engine import IMAGE

# An interpreter of an older version, as far as a program can see.
OLD_PYTHON = """#!/usr/bin/bash
exec /usr/bin/python3 -I -S -c 'import sys; sys.version_info = (3, 8, 0); exec(sys.argv[1])' "$4"
"""


def archive(**files):
    """A tar archive with executable files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


async def pieces(data):
    yield data


@asynccontextmanager
async def image(docker, *, base=None, **files):
    """An image that nobody knows: the files, upon the sandboxes' image or alone."""
    name = f"sandfleet-test-{uuid.uuid4().hex[:12]}"
    content = archive(**files)
    if base is None:
        params = [("fromSrc", "-"), ("repo", name), ("tag", "latest")]
        await docker.call("POST", "/images/create", params=params, data=pieces(content))
    else:
        labels = {"sandfleet": "1", "sandfleet.instance": name}
        made = await docker.call("POST", "/containers/create", body={"Image": base, "Labels": labels})
        try:
            await docker.call(
                "PUT", f"/containers/{made['Id']}/archive", params={"path": "/"}, data=pieces(content)
            )
            params = [("container", made["Id"]), ("repo", name), ("changes", f"LABEL {VERSION_LABEL}=")]
            await docker.call("POST", "/commit", params=params, body={})
        finally:
            await docker.remove_container(made["Id"])
    try:
        yield name
    finally:
        with suppress(EngineError):
            await docker.call("DELETE", f"/images/{name}", params={"force": "true"})


async def refusal(docker, **changes):
    """What stands against the default template with these changes; no container is left."""
    instance = f"test-{uuid.uuid4().hex[:12]}"
    labels = {"sandfleet": "1", "sandfleet.instance": instance}
    template = read_templates(Settings()).templates[DEFAULT].model_copy(update=changes)
    found = await refusals(docker, [template], labels)
    assert await docker.containers(f"sandfleet.instance={instance}") == []
    return found.get(DEFAULT)


@pytest.fixture
async def docker(engine):
    async with Engine(engine) as made:
        yield made


async def test_an_image_without_python_is_refused(docker):
    """Red when the start of the first sandbox is what tells."""
    async with image(docker, file="nothing") as name:
        assert f"the image {name} has no python3 on its PATH" in await refusal(docker, image=name)


async def test_an_image_with_an_old_python_is_refused(docker):
    async with image(docker, base=IMAGE, **{"usr/local/sbin/python3": OLD_PYTHON}) as name:
        reason = await refusal(docker, image=name)
        assert f"the image {name} has Python 3.8. Sandboxes need Python 3.9 or newer" in reason


async def test_an_image_whose_library_is_cut_short_is_refused(docker):
    """Red when only the version is looked at: some distributions pack the library apart."""
    broken = '#!/usr/bin/bash\nexec /usr/bin/python3 -I -S -c \'import sys; sys.modules["selectors"] = None; exec(sys.argv[1])\' "$4"\n'
    async with image(docker, base=IMAGE, **{"usr/local/sbin/python3": broken}) as name:
        assert "cannot import the modules" in await refusal(docker, image=name)


async def test_an_image_from_which_the_machine_cannot_be_dialled_is_refused(docker):
    """Red when only Python is tried: gVisor needs to be told that sockets of the machine may be used.

    An interpreter whose sockets do not connect stands for a runtime that does not let them.
    """
    mute = "#!/usr/bin/bash\nexec /usr/bin/python3 -I -S -c 'import socket, sys\nclass Mute(socket.socket):\n def connect(self, _): raise OSError\nsocket.socket = Mute; exec(sys.argv[1])' \"$4\"\n"
    async with image(docker, base=IMAGE, **{"usr/local/sbin/python3": mute}) as name:
        assert '"--host-uds=open"' in await refusal(docker, image=name)


async def test_an_image_that_cannot_be_had_is_refused(docker):
    name = f"localhost:1/sandfleet-test-{uuid.uuid4().hex[:8]}"
    assert f"the engine has no image {name} and cannot pull it" in await refusal(docker, image=name)


async def test_a_runtime_that_the_engine_does_not_have_is_refused(docker):
    reason = await refusal(docker, runtime="no-such-runtime")
    assert "the engine has no runtime 'no-such-runtime', only" in reason


async def test_an_image_with_python_and_nothing_of_ours_will_do(docker, own_host, tmp_path):
    """Red when an image must be made by us; and one bad template does not keep the host from the others."""
    async with image(docker, base=IMAGE, **{"opt/theirs": "theirs"}) as good, image(docker, file="x") as bad:
        file = tmp_path / "sandfleet.toml"
        file.write_text(f'[templates.theirs]\nimage = "{good}"\n[templates.bad]\nimage = "{bad}"\n')
        host = own_host(SANDFLEET_TEMPLATES=str(file))
        await host.start()
        client = SandboxClient(host.socket)
        sandbox = await host.sandbox(client)
        sandbox.choose_template("theirs")
        assert (await sandbox.exec("cat /opt/theirs", timeout_s=60)).stdout == b"theirs"
        await sandbox.close()
        other = await host.sandbox(client)
        other.choose_template("bad")
        with pytest.raises(TemplateUnavailable, match="has no python3 on its PATH"):
            await other.exec("true")
        assert any("has no python3" in line["message"] for line in host.logged() if line["level"] == "ERROR")
        await client.aclose()
        assert await host.stop() == 0
