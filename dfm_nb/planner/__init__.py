"""The estimate of memory and time, of a training, computed from the settings; and settings from the time (`minutes`).

Parameters, FLOPs and widths come from `config.counts`. Memory of CUDA and NCCL, and fragmentation, are not included:
`dfm plan` leaves 15 % of the memory to them.
"""

VERBS = {"plan": ("dfm_nb.planner.plan", "layouts that fit a model on some GPUs, with memory and relative time")}
