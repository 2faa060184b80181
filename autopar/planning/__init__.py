"""Planning: from a traced step to a plan.

`plan_step` is the public function; `method_planning` plans by any method. `step_planner` plans a
step as one program, with `recompute_planning` and `offload_planning`. `pipeline_planner` plans a
pipeline: `stage_construction` searches its stages, `option_search` its open options.
"""
