"""`slime launch`: writes the script or manifest of a run for a cluster, and hands it to the cluster's own tool.

`slime cluster check`: looks at the nodes of a Ray cluster before a run.

The tools of Slurm, Kubernetes, SkyPilot and Ray start, watch and end jobs; nothing here does that in their place.
"""
