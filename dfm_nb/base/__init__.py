"""Shared by all rooms: records, plug-ins, files, the run folder, metrics, log, video. Imports no other room."""
