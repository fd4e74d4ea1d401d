"""What a run reports: metrics, trackers, terminal output, files of samples, pictures.

Nothing here changes what a run computes. If something cannot be written, for example because the disk is full, this
is reported once and the run continues.
"""
