"""Parts of the policy `upriver.policies.kept`: its types, costs, linear program, rounding and search."""
