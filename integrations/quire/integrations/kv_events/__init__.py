"""Changes of the prefix caches, for routers that keep an index of them.

replica.py    pure: a copy of a pool's findable blocks, which turns WatchBlocks into ordered changes
follower.py   keeps the copy of one pool up to date, through outages and new epochs
"""
