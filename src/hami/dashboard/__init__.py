"""One read-only web page over the state the scheduler has: what is granted and used, and why pods wait."""
