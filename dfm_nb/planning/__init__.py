"""The estimate of memory and time, for training and generation, computed from the settings: nothing is built.

Parameters, FLOPs and widths come from `config.counts`. Memory of CUDA and NCCL, and fragmentation, are not included:
`dfm plan` leaves 15 % of the memory to them.
"""
