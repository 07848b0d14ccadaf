# A broker in an image of its own; docs/container.md tells how to run it.
#
# Two stages: the compiler that builds the codec stays in the first.

FROM python:3.11-slim-bookworm AS build

# The image's own Python brings its headers; Debian's, where the image is made from it, does not.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && if [ ! -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; \
       then apt-get install -y --no-install-recommends python3-dev; fi \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /source
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1

# What changes seldom comes first: the environment of the broker, with its dependencies, and the
# tools that build it, in an environment that is left behind. No pip in the former.
COPY constraints.txt ./
RUN python3 -m venv --without-pip /opt/leveret \
    && python3 -m venv /tools \
    && /tools/bin/pip install -c constraints.txt 'setuptools>=77' Cython

COPY LICENSE README.md MANIFEST.in pyproject.toml setup.py ./
COPY leveret leveret
COPY broker broker
COPY protocol protocol
COPY storage storage
COPY spark_jobs spark_jobs
RUN /tools/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
    && /tools/bin/pip --python /opt/leveret/bin/python install -c constraints.txt /wheels/*.whl \
    # An installation goes on without the compiled codec; an image is not to.
    # -I: what was installed, not the sources in this folder.
    && /opt/leveret/bin/python -I -c 'from leveret.protocol.twin import COMPILED; assert COMPILED'


FROM python:3.11-slim-bookworm

# By number, so that Kubernetes can tell it is not root.
RUN groupadd --gid 5672 leveret \
    && useradd --uid 5672 --gid 5672 --no-create-home --home-dir /data --shell /usr/sbin/nologin leveret \
    && install --directory --owner=5672 --group=5672 --mode=0750 /data
COPY --from=build /opt/leveret /opt/leveret

ENV PATH=/opt/leveret/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    LEVERET_HOST=0.0.0.0 \
    LEVERET_DATA=/data
USER 5672:5672
WORKDIR /data
VOLUME /data
EXPOSE 5672

# Asks the port that LEVERET_PORT or LEVERET_CONFIG names, as the broker does.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 CMD ["leveret", "ping"]

# Not through a shell: the broker is process 1 and gets the signals itself. Process 1 loses those it
# does not handle yet, unless they are blocked: then they wait until `leveret serve` is ready.
ENTRYPOINT ["env", "--block-signal=TERM", "leveret"]
CMD ["serve"]
