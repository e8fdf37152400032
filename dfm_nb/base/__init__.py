"""What every room uses: records, plugins, files, the run folder, metrics, log, video. Imports nothing of ours."""
