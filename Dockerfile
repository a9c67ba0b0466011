# slm_toolkit for NVIDIA GPUs, with pinned versions:
#   docker build -t slm_toolkit .
#   docker run --gpus all --ipc host -v $PWD/runs:/work/runs slm_toolkit compare
# CUDA 13 and nvcc from the base image: DeepSpeed compiles its kernels with them. --ipc host: NCCL needs shared memory.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ git libaio-dev ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/slm_toolkit
ENV PATH=/opt/slm_toolkit/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

COPY . /src
RUN pip install -c /src/constraints/docker.txt "/src[peft,fp8,tensorboard]" && slm --version

WORKDIR /work
ENTRYPOINT ["slm"]
