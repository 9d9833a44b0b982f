"""The shared region of one container: its layouts, and what `hami region` shows and changes."""
