"""Keep computed rows in the object store, a folder for each tenant, and answer from them."""
