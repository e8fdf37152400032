"""EDM and its samplers in pure torch: no files, no processes, no megatron."""
