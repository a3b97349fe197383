# What the nox sessions need (but gh for `github`, compute-sanitizer for `sanitize`, docker for cibuildwheel), for a clone at /work:
# docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD:/work" IMAGE nox -l
ARG BASE=docker.io/library/python:3.13-slim-trixie

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements /tmp/requirements
RUN python3 -m venv /tmp/pip \
 && python3 -m venv --without-pip /opt/nox \
 && /tmp/pip/bin/pip --python /opt/nox/bin/python install --no-compile --require-hashes -r /tmp/requirements/nox.txt

FROM ${BASE}
LABEL org.opencontainers.image.title="cuops-dev" \
      org.opencontainers.image.description="What the nox sessions of cuops need" \
      org.opencontainers.image.source="https://github.com/cuops/cuops" \
      org.opencontainers.image.licenses="Apache-2.0"
# The distribution gives one version of each at a time: a pin here would only break.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    buildah ca-certificates docker-registry git mmdebstrap skopeo \
 && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/log/alternatives.log /var/cache/ldconfig
RUN git config --system --add safe.directory /work
COPY --from=build /opt/nox /opt/nox
ENV PATH="/opt/nox/bin:$PATH" HOME=/tmp PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /work
CMD ["nox", "-l"]
