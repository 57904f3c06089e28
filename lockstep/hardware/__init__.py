"""What machines can do, and what models need from them.

`host` (cores, memory, torch's environment) imports nothing slow. `device` chooses, measures and describes this rank's CPU or
GPU. `gpus` lists the peak rates of GPUs, and estimates the time on machines elsewhere. `footprint` counts parameters,
FLOPs and bytes.
"""
