# The streaming gateway. infra_cdk/packaging.py gathers the context: nothing is fetched here.
ARG BASE=python:3.13-slim
FROM ${BASE}
COPY site /opt/sandfleet
RUN python3 -m compileall -q -j 0 /opt/sandfleet || true
ENV PYTHONPATH=/opt/sandfleet PYTHONUNBUFFERED=1
WORKDIR /tmp
# Where ECS mounts a volume for a process that may write nowhere else: a new one takes owner and mode from here, and without
# VOLUME it would be root's alone.
RUN chmod 1777 /tmp
VOLUME ["/tmp"]
USER 65532:65532
ENTRYPOINT ["python3", "-P", "-m", "sandfleet.functions.api"]
