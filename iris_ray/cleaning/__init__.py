"""The service ``cleaning``: old files of libtpu, Ray and iris_ray go from hosts and the head, by age and size.

`core.py` decides what goes, `disk.py` finds and removes it on one machine, `controller.py` has all machines cleaned.
"""
