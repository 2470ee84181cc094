# The harness on NVIDIA's CUDA image, set up as `make setup setup-gpu` does anywhere:
#   docker build -t kvbench .
#   docker run --gpus all --ipc host -v "$HOME/.cache/huggingface:/cache" -v "$PWD/runs:/kvbench/runs" kvbench make check
# CUDA's version is that of the compiler, for flash-attn; torch brings its own libraries, and the driver is the machine's.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /kvbench
COPY . .
# MAX_JOBS bounds the compilers of flash-attn, each of which takes 4 GB; without it the set-up goes on.
ARG MAX_JOBS=4
RUN MAX_JOBS=$MAX_JOBS make setup setup-gpu

ENV HF_HOME=/cache
CMD ["make", "check"]
