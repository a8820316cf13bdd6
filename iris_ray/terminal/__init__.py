"""Live lines at the bottom of a terminal, which show the progress of whatever takes a while. All that waits uses them.

May import: nothing of iris_ray.
Start with `live_lines.py`: `live_line` gives a line, and the one `LiveLines` of the process draws all of them.
`streams.py` has everything else that the process prints appear above the lines.
"""

from iris_ray.terminal.live_lines import LiveLine, live_line

__all__ = ["LiveLine", "live_line"]
