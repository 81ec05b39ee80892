# Surefoot with PyTorch's CUDA build: docker build -t surefoot . && docker run --gpus all --ipc=host -v $PWD:/work surefoot
# train run.yaml. --ipc=host gives NCCL and workers shared memory; without it they get 64 MiB (SF701).
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir torch==2.13.* && pip install --no-cache-dir ".[hub,report,rewards,stacks,tensorboard]"
WORKDIR /work
ENTRYPOINT ["surefoot"]
