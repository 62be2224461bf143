"""The families of generated shell tasks, easiest first."""

from ts_jax.data.families import folders, notes, single

ALL = (
    single.MAKE_FOLDER,
    single.WRITE_WORD,
    single.RENAME_FILE,
    notes.NOTE_FOLDERS,
    notes.FOLLOW_NOTE,
    notes.SECRET_WORD,
    folders.FOUND_FILE,
    notes.TRAIL,
    folders.COUNT_FILES,
    folders.FIND_DELETE,
    notes.TWO_WORDS,
)
BY_NAME = {family.name: family for family in ALL}
HELD_OUT = notes.TWO_WORDS.name
