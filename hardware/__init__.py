"""What machines can do, and what models need of them.

`host` (cores, memory, how torch is set up) imports nothing slow. `device` measures and names the processor or GPU
at hand. `gpus` knows the peaks of GPUs, and estimates time and traffic on machines that are not at hand. `footprint` counts
parameters, FLOPs and bytes.
"""
