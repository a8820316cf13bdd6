"""``python -m iris_ray``: the command line."""

from iris_ray.cli.main import main

if __name__ == "__main__":
    main(prog_name="iris-ray")
