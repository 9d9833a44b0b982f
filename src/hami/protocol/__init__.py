"""What travels between components: keys, codecs, quantities, object views, the lock machine. No I/O."""
