# slime with everything it needs: docker build --tag slime .
# The packages bring CUDA, so that the base needs none; the driver is the host's. With DEVICE=cpu, for machines without a GPU.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

ARG DEVICE=cuda
# nvidia-container-toolkit gives a container the GPUs and the driver's tool by these.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# gcc and g++ compile kernels while runs go on.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ libc6-dev libnuma1 make \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --uid 1000 --create-home slime && mkdir /slime && chown slime /slime
USER slime
WORKDIR /slime

COPY --chown=slime . .
RUN make install DEVICE=${DEVICE} && mkdir -p models outputs checkpoints
ENV PATH=/slime/.venv/bin:${PATH}

HEALTHCHECK --interval=5m --timeout=2m CMD ["slime", "doctor"]
CMD ["slime", "doctor"]
