# vla-rl in a container.
#
#   docker build -t vla-rl .                                                  # CPU
#   docker build -t vla-rl:cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 .   # GPU: --gpus all
#   docker run --rm -v "$PWD/runs:/data/runs" vla-rl demo
#   docker run --rm --gpus all -v "$PWD/runs:/data/runs" vla-rl:cuda bench gpu
#
# PyTorch's wheels carry CUDA's libraries; the CUDA base brings what the driver and EGL need. The weights of a hub are kept where
# HF_HOME is: mount a volume there. LEVEL=dev adds LIBERO and the test tools.
ARG BASE=ubuntu:24.04
FROM ${BASE}
ARG LEVEL=core
ENV DEBIAN_FRONTEND=noninteractive \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics \
    HF_HOME=/cache/huggingface \
    PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install -y --no-install-recommends \
        python3.12 python3.12-venv make g++ libglib2.0-0 \
        libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libgles2 libopengl0 && \
    rm -rf /var/lib/apt/lists/*
COPY . /opt/vla-rl
RUN VENV=/opt/venv PYTHON=python3.12 /opt/vla-rl/scripts/setup.sh ${LEVEL}
ENV PATH=/opt/venv/bin:$PATH MUJOCO_GL=egl
WORKDIR /data
ENTRYPOINT ["vla-rl"]
CMD ["doctor"]
