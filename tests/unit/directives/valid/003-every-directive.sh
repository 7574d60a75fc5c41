#!/bin/bash
#CRATER task=llm_finetune model=Llama-3-8B method=lora precision=bf16 quantization=none
#CRATER gpus=2 gpu-memory=16GiB gpu-type=a100 cpus=8 avx=avx512
#CRATER memory-bandwidth=140GB/s ssd-iops=800k ssd-latency=100us io-pattern=sequential
#CRATER cache=200GB checkpoint=/project/ckpt numa=strict max-wait=30m preemptible=no mode=advise
#CRATER model-params=8.03B framework=torchtune optimizer=adamw lora-rank=16 micro-batch=2
#CRATER sequence-length=2048 activation-checkpointing=yes sharding=zero2 tensor-parallel=2
#CRATER pipeline-parallel=4 tensor-cores=yes mig=1g.5gb gpu-sharing=no driver=535.104 cuda=12.2
#CRATER physical-cores=yes min-gpu-utilization=65 traced-memory=21GiB
