"""Train epochs by choice on two hosts: settings, plans, the hosts, and the process that trains."""
