# An executor with the user's project. infra_cdk/packaging.py gathers the context: nothing is fetched here.
ARG BASE=python:3.13-slim
FROM ${BASE}
COPY site /opt/sandfleet
# Compiled once here instead of at each start of a task whose root is read-only; the project for itself, since it changes most.
RUN python3 -m compileall -q -j 0 /opt/sandfleet || true
COPY project /srv/project
RUN python3 -m compileall -q /srv/project || true
ENV PYTHONPATH=/opt/sandfleet PYTHONUNBUFFERED=1
WORKDIR /srv/project
# Where ECS mounts a volume for a process that may write nowhere else: a new one takes owner and mode from here, and without
# VOLUME it would be root's alone.
RUN chmod 1777 /tmp
VOLUME ["/tmp"]
USER 65532:65532
# -P: a module of the project's never hides one of Python's or ours.
ENTRYPOINT ["python3", "-P", "-m", "sandfleet.fleet.executor"]
