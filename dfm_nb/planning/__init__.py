"""The one estimate of memory and time, of training and of generation, by arithmetic on the settings: nothing is built.

Parameters, FLOPs and widths come from `config.counts`. What CUDA and NCCL keep for themselves, and fragmentation, are
not in it: `dfm plan --margin` is for them.
"""
