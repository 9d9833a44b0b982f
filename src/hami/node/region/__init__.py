"""The shared region of one container, for people: what `hami region` shows and changes."""
