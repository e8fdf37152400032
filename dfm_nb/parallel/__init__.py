"""Process groups, devices and seeds: megatron-core's parallel state on NCCL or gloo."""

from dfm_nb.parallel import megatron_cpu

megatron_cpu.prepare()  # before any module of ours imports megatron.core

from dfm_nb.parallel.groups import *  # noqa: E402, F403
