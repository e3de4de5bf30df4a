"""Lines of any log: files, compression, following, launcher prefixes, time stamps, ranks.

A leaf: it uses no other room.

sources.py    what a path names: files, directories, `-`, gs://; opened and decompressed, damaged ones too
blocks.py     a stream as blocks of whole lines, without terminal colours and redraws
followers.py  a file that grows, is truncated or rotated
prefixes.py   what launchers put before a line: which rank, which pod, when
stamps.py     time stamps of many styles -> UTC microseconds
"""
