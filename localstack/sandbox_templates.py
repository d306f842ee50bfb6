"""The sandbox templates that a project's runs would get on this machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import get_origin

from sandfleet.shared.settings import Settings
from sandfleet.shared.templates import Templates, read_templates, templates_beside

TRIAL_LABELS = {"sandfleet": "1", "sandfleet.instance": "trial"}
"""Of the containers that only try an image."""


def templates_path(project: Path, env: Mapping[str, str]) -> Path | None:
    """The file with the templates: what ``SANDFLEET_TEMPLATES`` names, or the one beside the project, if any."""
    named = env.get("SANDFLEET_TEMPLATES")
    return Path(named) if named else templates_beside(project)


def templates_of(project: Path, env: Mapping[str, str]) -> Templates:
    """The templates of a project; ``env`` is added to this process's. Raises TemplatesInvalid."""
    given: dict[str, object] = {
        name: json.loads(env[variable]) if get_origin(field.annotation) in (dict, list) else env[variable]
        for name, field in Settings.model_fields.items()
        if (variable := f"SANDFLEET_{name.upper()}") in env
    }
    given["templates"] = templates_path(project, env)
    return read_templates(Settings.model_validate({**Settings().model_dump(), **given}))
