"""What runs as PID 1 inside every sandbox: a folder of modules, standard library only, Python 3.9 or newer.

The host links the folder into every sandbox and starts it as ``python3 -I -S FOLDER SOCKET [UID GID]``
(``fleet/host/agent_files.py``). It imports neither ``typing`` nor anything else that an idle sandbox would carry in
memory for nothing. Of all this the host itself uses ``wire`` only.
"""
