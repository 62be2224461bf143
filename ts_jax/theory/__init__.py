"""When learner work becomes ready and how long an update takes: Appendix F of ThunderSyncRL, and its replay on traces.

Closed forms: `release` (which fraction is ready when), `speedup` (tail, speedup, bound), `waves` (several rollout waves).
Explicit times: `jobs` (what a workload releases at a granularity), `sampling` (workloads drawn from the model), `replay`.
`discrepancy` compares the three predictions of a cell.
"""
