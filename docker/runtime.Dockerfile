# One CUDA version of cuops, on a slim Python, for a machine whose driver comes from the NVIDIA container toolkit.
# `nox -s docker` builds it, from a folder with dist/ and requirements/.
ARG BASE=docker.io/library/python:3.13-slim-trixie

FROM ${BASE} AS build
ARG CUDA=cu121
ARG VERSION
ARG INDEX=""
ARG TORCH=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY . /tmp/context
# pip stays behind in this stage. The byte code has no time in it, and no order of chance: both builds of a commit are one.
# hadolint ignore=DL3013
RUN python3 -m venv /tmp/pip \
 && python3 -m venv --without-pip /opt/cuops \
 && pip() { /tmp/pip/bin/pip --python /opt/cuops/bin/python "$@"; } \
 && pip install --no-compile --require-hashes -r /tmp/context/requirements/runtime.txt \
 && if [ -n "$INDEX" ]; then set -- --extra-index-url "$INDEX"; else set -- --no-index --find-links /tmp/context/dist; fi \
 && pip install --no-compile --no-deps "$@" "cuops==$VERSION" "cuops-$CUDA==$VERSION" \
 && if [ -n "$TORCH" ]; then pip install --no-compile "$TORCH"; fi \
 && pip check \
 && rm -r /opt/cuops/lib/python3.*/site-packages/numpy/*/tests \
 && PYTHONHASHSEED=0 python3 -m compileall -qf --invalidation-mode unchecked-hash /opt/cuops/lib

FROM ${BASE}
LABEL org.opencontainers.image.title="cuops" \
      org.opencontainers.image.description="CUDA operators for PyTorch and NumPy: RMSNorm, Gaussian sampling, Kronecker-factored linear layers" \
      org.opencontainers.image.source="https://github.com/cuops/cuops" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/cuops /opt/cuops
ENV PATH="/opt/cuops/bin:$PATH" HOME=/tmp PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /work
CMD ["cuops", "doctor"]
