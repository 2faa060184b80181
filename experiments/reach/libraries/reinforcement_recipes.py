"""Training steps of reinforcement learning, and of language models by preferences and rewards."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from experiments.reach.public_step import BATCH, PublicStep, features, tokens


class _Mlp(nn.Module):
    sizes: Sequence[int]

    @nn.compact
    def __call__(self, x):
        for size in self.sizes[:-1]:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.sizes[-1])(x)


class _Agent(nn.Module):
    actions: int = 4

    @nn.compact
    def __call__(self, obs):
        orthogonal = nn.initializers.orthogonal
        actor = nn.tanh(nn.Dense(32, kernel_init=orthogonal(2**0.5))(obs))
        actor = nn.tanh(nn.Dense(32, kernel_init=orthogonal(2**0.5))(actor))
        logits = nn.Dense(self.actions, kernel_init=orthogonal(0.01))(actor)
        critic = nn.tanh(nn.Dense(32, kernel_init=orthogonal(2**0.5))(obs))
        critic = nn.tanh(nn.Dense(32, kernel_init=orthogonal(2**0.5))(critic))
        return logits, jnp.squeeze(nn.Dense(1)(critic), axis=-1)


class _Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


def ppo() -> PublicStep:
    """PPO's minibatch update: clipped values and ratios, standardized advantages, entropy."""
    network = _Agent()

    def update_minibatch(state: TrainState, batch: _Transition):
        def loss_fn(params):
            logits, value = network.apply(params, batch.obs)
            log_probs = jax.nn.log_softmax(logits)
            log_prob = jnp.take_along_axis(log_probs, batch.action[:, None], axis=1)[:, 0]
            clipped = batch.value + (value - batch.value).clip(-0.2, 0.2)
            losses = jnp.square(value - batch.target)
            value_loss = 0.5 * jnp.maximum(losses, jnp.square(clipped - batch.target)).mean()
            ratio = jnp.exp(log_prob - batch.log_prob)
            gae = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
            actor_loss = -jnp.minimum(ratio * gae, jnp.clip(ratio, 0.8, 1.2) * gae).mean()
            entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
            total = actor_loss + 0.5 * value_loss - 0.01 * entropy
            kl = (batch.log_prob - log_prob).mean()
            fraction = (jnp.abs(ratio - 1.0) > 0.2).mean()
            return total, (value_loss, actor_loss, entropy, kl, fraction)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), (loss, aux)

    obs = features(6)
    params = network.init(jax.random.PRNGKey(0), obs)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
    state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
    numbers = np.random.default_rng(1)
    batch = _Transition(
        obs,
        jnp.asarray(numbers.integers(0, 4, BATCH), jnp.int32),
        jnp.asarray(-1.4 + 0.1 * numbers.normal(size=BATCH), jnp.float32),
        *(jnp.asarray(numbers.normal(size=BATCH), jnp.float32) for _ in range(3)),
    )
    return PublicStep(update_minibatch, (state, batch))


def dqn() -> PublicStep:
    """Double DQN with a target network that is copied every 100 steps."""
    q_network = _Mlp((32, 32, 4))
    tx = optax.adam(1e-3)

    class AgentState(NamedTuple):
        params: Any
        target_params: Any
        opt_state: Any
        steps: jax.Array

    def learner_step(state, transitions):
        obs, actions = transitions["obs"], transitions["action"]
        discount = 0.99 * (1.0 - transitions["done"])

        def loss_fn(params):
            q_values = q_network.apply(params, obs)
            chosen = q_values[jnp.arange(obs.shape[0]), actions]
            best = jnp.argmax(q_network.apply(params, transitions["next_obs"]), axis=-1)
            next_q = q_network.apply(state.target_params, transitions["next_obs"])
            bootstrap = jax.vmap(lambda q, a: q[a])(next_q, best)
            target = jax.lax.stop_gradient(transitions["reward"] + discount * bootstrap)
            errors = target - chosen
            return jnp.mean(transitions["weight"] * optax.huber_loss(errors)), errors

        (loss, errors), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        target = optax.periodic_update(params, state.target_params, state.steps, 100)
        new_state = AgentState(params, target, opt_state, state.steps + 1)
        return new_state, loss, jnp.abs(errors) + 1e-6

    obs = features(6)
    params = q_network.init(jax.random.key(0), obs)
    target = jax.tree.map(lambda x: 0.9 * x, params)
    numbers = np.random.default_rng(2)
    transitions = {
        "obs": obs,
        "action": jnp.asarray(numbers.integers(0, 4, BATCH), jnp.int32),
        "reward": jnp.asarray(numbers.normal(size=BATCH), jnp.float32),
        "next_obs": features(6, seed=3),
        "done": jnp.asarray(numbers.integers(0, 2, BATCH), jnp.float32),
        "weight": jnp.asarray(numbers.uniform(0.5, 1, BATCH), jnp.float32),
    }
    state = AgentState(params, target, tx.init(params), jnp.asarray(100, jnp.int32))
    return PublicStep(learner_step, (state, transitions))


def sac() -> PublicStep:
    """SAC: two critics, the actor against the new critics, the temperature, targets."""
    actor, critic = _Mlp((32, 32, 4)), _Mlp((32, 32, 1))

    def sample(params, obs, rng):
        mean, log_std = jnp.split(actor.apply(params, obs), 2, axis=-1)
        std = jnp.exp(jnp.clip(log_std, -5, 2))
        raw = mean + std * jax.random.normal(rng, mean.shape)
        action = jnp.tanh(raw)
        log_prob = -0.5 * ((raw - mean) / std) ** 2 - jnp.log(std) - 0.5 * jnp.log(2 * jnp.pi)
        log_prob -= jnp.log(1 - action**2 + 1e-6)
        return action, log_prob.sum(-1)

    def q_values(params, obs, action):
        x = jnp.concatenate([obs, action], axis=-1)
        return jax.vmap(critic.apply, in_axes=(0, None))(params, x)[..., 0]

    def update(actor_state, critic_state, alpha_state, target_params, batch, rng):
        rng, next_rng, actor_rng = jax.random.split(rng, 3)
        alpha = jnp.exp(alpha_state.params["log_alpha"])
        next_action, next_log_prob = sample(actor_state.params, batch["next_obs"], next_rng)
        next_q = q_values(target_params, batch["next_obs"], next_action).min(axis=0)
        target = batch["reward"] + 0.99 * batch["mask"] * (next_q - alpha * next_log_prob)

        def critic_loss_fn(params):
            q = q_values(params, batch["obs"], batch["action"])
            return ((q - target) ** 2).mean()

        critic_loss, grads = jax.value_and_grad(critic_loss_fn)(critic_state.params)
        critic_state = critic_state.apply_gradients(grads=grads)

        def actor_loss_fn(params):
            action, log_prob = sample(params, batch["obs"], actor_rng)
            q = q_values(critic_state.params, batch["obs"], action).min(axis=0)
            return (alpha * log_prob - q).mean(), -log_prob.mean()

        (actor_loss, entropy), grads = jax.value_and_grad(actor_loss_fn, has_aux=True)(
            actor_state.params
        )
        actor_state = actor_state.apply_gradients(grads=grads)

        def alpha_loss_fn(params):
            return jnp.exp(params["log_alpha"]) * (entropy + 2.0)

        grads = jax.grad(alpha_loss_fn)(alpha_state.params)
        alpha_state = alpha_state.apply_gradients(grads=grads)
        target_params = optax.incremental_update(critic_state.params, target_params, 0.005)
        info = {"critic_loss": critic_loss, "actor_loss": actor_loss, "entropy": entropy}
        return actor_state, critic_state, alpha_state, target_params, rng, info

    obs = features(6)
    actor_params = actor.init(jax.random.key(0), obs)
    keys = jax.random.split(jax.random.key(1), 2)
    critic_params = jax.vmap(critic.init, in_axes=(0, None))(keys, jnp.ones((1, 8)))
    states = [
        TrainState.create(apply_fn=None, params=params, tx=optax.adam(3e-4))
        for params in (actor_params, critic_params, {"log_alpha": jnp.zeros(())})
    ]
    batch = {
        "obs": obs,
        "action": jnp.tanh(features(2, seed=2)),
        "reward": features(seed=3),
        "mask": (features(seed=4) > -1).astype(jnp.float32),
        "next_obs": features(6, seed=5),
    }
    target = jax.tree.map(jnp.copy, critic_params)
    return PublicStep(update, (*states, target, batch, jax.random.PRNGKey(2)))


def impala() -> PublicStep:
    """IMPALA: importance-weighted returns (V-trace) by a reversed scan over time."""
    network = _Agent()
    tx = optax.chain(optax.clip_by_global_norm(40.0), optax.rmsprop(6e-4, decay=0.99, eps=1e-7))

    def vtrace(ratios, values, bootstrap, rewards, discounts):
        clipped = jnp.minimum(1.0, ratios)
        next_values = jnp.concatenate([values[1:], bootstrap[None]])
        deltas = clipped * (rewards + discounts * next_values - values)

        def backwards(total, inputs):
            delta, discount, c = inputs
            total = delta + discount * c * total
            return total, total

        _, errors = jax.lax.scan(
            backwards, jnp.zeros_like(bootstrap), (deltas, discounts, clipped), reverse=True
        )
        targets = errors + values
        next_targets = jnp.concatenate([targets[1:], bootstrap[None]])
        return targets, clipped * (rewards + discounts * next_targets - values)

    def update(params, opt_state, trajectories):
        def loss_fn(params):
            logits, values = network.apply(params, trajectories["obs"])  # (batch, time + 1, ...)
            log_probs = jax.nn.log_softmax(logits[:, :-1])
            one_hot = jax.nn.one_hot(trajectories["action"], 4)
            chosen = jnp.sum(log_probs * one_hot, -1)
            ratios = jnp.exp(jax.lax.stop_gradient(chosen) - trajectories["behaviour"])
            by_time = jax.tree.map(
                lambda x: jnp.swapaxes(x, 0, 1),
                (ratios, values, trajectories["reward"], trajectories["discount"]),
            )
            ratios, values_t, rewards, discounts = jax.lax.stop_gradient(by_time)
            targets, advantages = vtrace(ratios, values_t[:-1], values_t[-1], rewards, discounts)
            policy_loss = -jnp.sum(chosen.T * advantages)
            value_loss = 0.5 * jnp.sum(jnp.square(targets - values[:, :-1].T))
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs)
            return policy_loss + 0.5 * value_loss - 0.01 * entropy

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    numbers = np.random.default_rng(4)
    trajectories = {
        "obs": features(5, 6),
        "action": jnp.asarray(numbers.integers(0, 4, (BATCH, 4)), jnp.int32),
        "behaviour": jnp.asarray(-1.4 + 0.1 * numbers.normal(size=(BATCH, 4)), jnp.float32),
        "reward": jnp.asarray(numbers.normal(size=(BATCH, 4)), jnp.float32),
        "discount": jnp.asarray(0.99 * numbers.integers(0, 2, (BATCH, 4)), jnp.float32),
    }
    params = network.init(jax.random.key(0), trajectories["obs"])
    return PublicStep(update, (params, tx.init(params), trajectories))


class _CausalLm(nn.Module):
    """A small decoder; `positions` and a mask of padding keep left-padded prompts right."""

    vocabulary: int = 64
    width: int = 16

    @nn.compact
    def __call__(self, ids, attention_mask=None):
        length = ids.shape[1]
        if attention_mask is None:
            attention_mask = jnp.ones_like(ids)
        positions = jnp.clip(jnp.cumsum(attention_mask, axis=-1) - 1, 0)
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(ids) + nn.Embed(length, self.width)(positions)
        mask = nn.combine_masks(
            nn.make_causal_mask(ids),
            nn.make_attention_mask(jnp.ones_like(ids), attention_mask),
        )
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
            h = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(h))
        return embed.attend(nn.LayerNorm()(x))


def _log_probs(logits, ids):
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1).squeeze(-1)


def grpo() -> PublicStep:
    """GRPO: rewards are standardized within the answers to each prompt; a masked token mean."""
    model, group = _CausalLm(), 2
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))

    def train_step(params, ref_params, opt_state, batch):
        ids, mask = batch["completions"], batch["completion_mask"][:, 1:]
        rewards = batch["rewards"].reshape(-1, group)
        center = rewards.mean(axis=1, keepdims=True)
        advantages = (rewards - center) / (rewards.std(axis=1, keepdims=True) + 1e-4)
        advantages = advantages.reshape(-1)[:, None]
        reference = _log_probs(model.apply(ref_params, ids), ids)

        def loss_fn(params):
            log_probs = _log_probs(model.apply(params, ids), ids)
            ratio = jnp.exp(log_probs - batch["old_log_probs"][:, 1:])
            gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.28) * advantages)
            gap = reference - log_probs
            kl = jnp.exp(gap) - gap - 1.0
            per_token = -(gain - 0.04 * kl)
            loss = (per_token * mask).sum() / jnp.maximum(mask.sum(), 1.0)
            metrics = {
                "kl": (kl * mask).sum() / jnp.maximum(mask.sum(), 1.0),
                "length": mask.sum(axis=1).mean(),
                "reward": batch["rewards"].mean(),
                "reward_std": batch["rewards"].std(),
            }
            return loss, metrics

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics |= {"loss": loss, "grad_norm": optax.global_norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    ids = tokens()
    params = model.init(jax.random.key(0), ids)
    ref_params = jax.tree.map(lambda x: 0.97 * x, params)
    lengths = jnp.array([16, 9, 12, 16, 11, 7, 16, 10])
    where = jnp.arange(16)
    mask = ((where >= 4) & (where < lengths[:, None])).astype(jnp.float32)
    batch = {
        "completions": ids,
        "completion_mask": mask,
        "rewards": features(seed=7),
        "old_log_probs": -4.1 + 0.1 * features(16, seed=8),
    }
    return PublicStep(train_step, (params, ref_params, tx.init(params), batch))


def reward_model() -> PublicStep:
    """A reward model on pairs of answers, read at the last token of each that is no padding."""
    backbone, head = _CausalLm(), nn.Dense(1)
    tx = optax.adamw(1e-3)

    def score(params, ids, mask):
        hidden = backbone.apply(params["backbone"], ids, mask)
        last = mask.sum(axis=-1) - 1
        picked = hidden[jnp.arange(ids.shape[0]), last]
        return head.apply(params["head"], picked)[:, 0]

    def train_step(params, opt_state, batch):
        def loss_fn(params):
            chosen = score(params, batch["chosen"], batch["chosen_mask"])
            rejected = score(params, batch["rejected"], batch["rejected_mask"])
            margin = chosen - rejected
            loss = -jnp.mean(jax.nn.log_sigmoid(margin))
            loss += 0.01 * jnp.mean(jnp.square(chosen) + jnp.square(rejected))
            return loss, {"accuracy": jnp.mean(margin > 0), "margin": margin.mean()}

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, metrics

    ids = tokens()
    params = {
        "backbone": backbone.init(jax.random.key(0), ids),
        "head": head.init(jax.random.key(1), jnp.ones((1, 64))),
    }
    lengths = jnp.array([16, 9, 12, 16, 11, 7, 16, 10])[:, None]
    mask = (jnp.arange(16) < lengths).astype(jnp.int32)
    batch = {
        "chosen": ids,
        "chosen_mask": mask,
        "rejected": tokens(3),
        "rejected_mask": mask[::-1],
    }
    return PublicStep(train_step, (params, tx.init(params), batch))
