# The sandbox host daemon, which works on the machine's own engine, packet filter and control groups: it runs as root,
# privileged, in the machine's network. It needs nft and mkfs.ext4, which a base image may bring already.
ARG BASE=python:3.13-slim
FROM ${BASE}
RUN (command -v nft && command -v mkfs.ext4 && command -v debugfs) >/dev/null || (apt-get update -q && apt-get install -q -y --no-install-recommends nftables iproute2 e2fsprogs && rm -rf /var/lib/apt/lists/*)
COPY site /opt/sandfleet
COPY project /srv/project
RUN python3 -m compileall -q -j 0 /opt/sandfleet || true
ENV PYTHONPATH=/opt/sandfleet PYTHONUNBUFFERED=1
WORKDIR /tmp
ENTRYPOINT ["python3", "-P", "-m", "sandfleet.fleet.host"]
