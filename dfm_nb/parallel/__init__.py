"""Process groups, devices and seeds: megatron-core's parallel state on NCCL or gloo."""

from dfm_nb.parallel.groups import *  # noqa: F403
