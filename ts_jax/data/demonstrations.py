"""Worked examples for the prompt: they show the form of a turn and that looking comes before acting.

Neither is an instance of a task family, nor a command that solves one.
"""

DEMONSTRATIONS: tuple[tuple[dict[str, str], ...], ...] = (
    (
        {'role': 'user', 'content': 'Create an empty file named hat.txt.'},
        {'role': 'assistant', 'content': '```bash\ntouch hat.txt\nsubmit\n```'},
    ),
    (
        {'role': 'user', 'content': 'The file name.txt holds a name. Create an empty file of that name.'},
        {'role': 'assistant', 'content': '```bash\ncat name.txt\n```'},
        {'role': 'user', 'content': 'pot.txt'},
        {'role': 'assistant', 'content': '```bash\ntouch pot.txt\nsubmit\n```'},
    ),
)
