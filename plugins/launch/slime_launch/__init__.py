"""`slime launch`: writes the script or manifest of a run for a cluster, and hands it to the cluster's own tool.

The tools of Slurm, Kubernetes, SkyPilot and Ray start, watch and end jobs; nothing here does that in their place.
"""
