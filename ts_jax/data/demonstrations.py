"""Worked examples for the prompt: they show the form of a turn and that looking comes before acting.

None is an instance of a task family: the generator draws other names and words.
"""

DEMONSTRATIONS: tuple[tuple[dict[str, str], ...], ...] = (
    (
        {'role': 'user', 'content': 'First cat name.txt, then do what it says.'},
        {'role': 'assistant', 'content': '```bash\ncat name.txt\n```'},
        {'role': 'user', 'content': 'Make a directory named hat.'},
        {'role': 'assistant', 'content': '```bash\nmkdir hat\nsubmit\n```'},
    ),
    (
        {'role': 'user', 'content': 'Rename the file lid.txt to jar.txt.'},
        {'role': 'assistant', 'content': '```bash\nmv lid.txt jar.txt\nsubmit\n```'},
    ),
    (
        {'role': 'user', 'content': 'Write the word cup to pot.txt.'},
        {'role': 'assistant', 'content': '```bash\necho cup > pot.txt\nsubmit\n```'},
    ),
)
