"""The history: ended jobs, their attempts, what time went into, events, and utilisation, in one SQLite file.

May import: `model`, `state`, `errors`. No Ray. Start with `rows.py` (pure: rows made from the state), then
`history_file.py` (the file: schema, writing, bounds) and `reading.py` (statements that only read). `questions.py` has
the statements of the command line and the dashboard.
"""
