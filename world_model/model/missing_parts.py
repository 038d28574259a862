"""Messages for parts that a world model does not have."""

NO_PROBABILITY = (
    "env.imagination.reward: got 'probability', but the world model has no calibrated probability of success: it was "
    "fitted before there were any, or a higher score means no more success on its held-out episodes. Fit it again "
    "(vla-rl world-model fit), or set env.imagination.reward=success."
)
NO_VALUE = (
    "world model: has no value, which says whether an episode will succeed. Fit one on the policy's own episodes, from "
    "this world model on: vla-rl world-model fit ... world_model.start_from=FOLDER world_model.value.steps=400, with "
    "steps=0 in the other stages to keep them as they are."
)
NO_OBJECTS = (
    "env.imagination.reward: got 'objects', but the world model has no objects part with a calibrated probability. "
    "Fit one on the policy's own episodes, collected with collect.objects=true, from this world model on: vla-rl "
    "world-model fit ... world_model.start_from=FOLDER world_model.objects.steps=1600, with steps=0 in the other "
    "stages to keep them as they are; or set env.imagination.reward=probability."
)
NO_INVERSE = (
    "env.imagination.action_penalty: got above 0, but the world model has no inverse dynamics, which reads actions off "
    "frames. Fit one, from this world model on: vla-rl world-model fit ... world_model.start_from=FOLDER "
    "world_model.inverse.steps=600, with steps=0 in the other stages to keep them as they are; or set "
    "env.imagination.action_penalty=0."
)
