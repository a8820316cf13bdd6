"""iris_ray: run a function on every host of TPU slices, all or none, through preemptions, on Ray."""
