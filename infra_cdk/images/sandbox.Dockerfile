# What the image of the default sandbox template is made from: in the deployment's own registry, since hosts that start could
# not wait for another one, nor for its limits.
ARG BASE=python:3.13-slim
FROM ${BASE}
