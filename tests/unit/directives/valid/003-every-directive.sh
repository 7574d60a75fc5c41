#!/bin/bash
#CRATER task=llm_finetune model=Llama-3-8B method=lora precision=bf16 quantization=none
#CRATER gpus=2 gpu-memory=16GiB gpu-type=a100 cpus=8 avx=avx512
#CRATER memory-bandwidth=140GB/s ssd-iops=800k ssd-latency=100us io-pattern=sequential
#CRATER cache=200GB checkpoint=/project/ckpt numa=strict max-wait=30m preemptible=no mode=advise
