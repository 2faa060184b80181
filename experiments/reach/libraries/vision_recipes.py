"""Training steps of models of images, as tutorials and the code of papers write them."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from experiments.reach.public_step import PublicStep, classes, features


class _Cnn(nn.Module):
    classes: int = 10

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.GroupNorm(4)(nn.Conv(16, (3, 3))(x)))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape((x.shape[0], -1))
        return nn.Dense(self.classes)(nn.relu(nn.Dense(32)(x)))


class _Vit(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (2, 2), (2, 2))(x)
        b, h, w, c = x.shape
        x = x.reshape(b, h * w, c) + self.param("pos", nn.initializers.normal(0.02), (1, h * w, c))
        for _ in range(2):
            x = x + nn.SelfAttention(2)(nn.LayerNorm()(x))
            x = x + nn.Dense(c)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.LayerNorm()(x)


def detr() -> PublicStep:
    """DETR: greedy matching of queries to objects, and losses over the number of objects."""

    class Detr(nn.Module):
        queries: int = 6

        @nn.compact
        def __call__(self, images):
            memory = _Vit()(images)
            query = self.param("queries", nn.initializers.normal(1.0), (self.queries, 16))
            x = jnp.tile(query[None], (images.shape[0], 1, 1))
            for _ in range(2):
                x = x + nn.SelfAttention(2)(nn.LayerNorm()(x))
                x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), memory)
                x = x + nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x))))
            return nn.Dense(5)(x), nn.sigmoid(nn.Dense(4)(nn.relu(nn.Dense(16)(x))))

    model = Detr()
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-4))

    def generalized_iou(a, b):
        (a_low, a_high), (b_low, b_high) = (
            (box[..., :2] - box[..., 2:] / 2, box[..., :2] + box[..., 2:] / 2) for box in (a, b)
        )
        inner = jnp.clip(jnp.minimum(a_high, b_high) - jnp.maximum(a_low, b_low), 0)
        overlap = inner.prod(-1)
        union = (a_high - a_low).prod(-1) + (b_high - b_low).prod(-1) - overlap
        outer = (jnp.maximum(a_high, b_high) - jnp.minimum(a_low, b_low)).prod(-1)
        return overlap / (union + 1e-7) - (outer - union) / (outer + 1e-7)

    def match(cost):
        """Return the query of each object: the cheapest that is left, object by object."""

        def pick(taken, row):
            query = jnp.argmin(jnp.where(taken, jnp.inf, row))
            return taken.at[query].set(True), query

        return jax.lax.scan(pick, jnp.zeros(cost.shape[1], bool), cost)[1]

    def train_step(params, opt_state, images, boxes, labels, valid):
        def loss_fn(params):
            logits, predicted = model.apply(params, images)
            probabilities = jax.nn.softmax(logits)
            class_cost = -jnp.take_along_axis(
                probabilities.transpose(0, 2, 1), labels[:, :, None], axis=1
            )
            distance = jnp.abs(boxes[:, :, None] - predicted[:, None]).sum(-1)
            iou = generalized_iou(boxes[:, :, None], predicted[:, None])
            cost = class_cost + 5 * distance - 2 * iou
            cost = jnp.where(valid[:, :, None], cost, 1e3)
            matched = jax.vmap(match)(jax.lax.stop_gradient(cost))
            num_boxes = jnp.maximum(valid.sum(), 1).astype(jnp.float32)

            targets = jnp.full(logits.shape[:2], 4)
            rows = jnp.arange(logits.shape[0])[:, None]
            targets = targets.at[rows, matched].set(jnp.where(valid, labels, 4))
            weights = jnp.where(targets == 4, 0.1, 1.0)
            xent = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            class_loss = (xent * weights).sum() / weights.sum()
            chosen = jnp.take_along_axis(predicted, matched[:, :, None], axis=1)
            l1 = (jnp.abs(chosen - boxes).sum(-1) * valid).sum() / num_boxes
            giou = ((1 - generalized_iou(chosen, boxes)) * valid).sum() / num_boxes
            losses = {"class": class_loss, "l1": l1, "giou": giou}
            return class_loss + 5 * l1 + 2 * giou, losses

        (loss, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, losses

    images = features(8, 8, 3)
    numbers = np.random.default_rng(3)
    boxes = jnp.asarray(numbers.uniform(0.2, 0.6, (8, 3, 4)), jnp.float32)
    labels = jnp.asarray(numbers.integers(0, 4, (8, 3)), jnp.int32)
    valid = jnp.arange(3) < jnp.array([3, 1, 2, 3, 2, 0, 1, 3])[:, None]
    params = model.init(jax.random.key(0), images)
    return PublicStep(train_step, (params, tx.init(params), images, boxes, labels, valid))


def sam() -> PublicStep:
    """Sharpness-aware minimization: the gradient at the parameters that a first one moves."""
    model = _Cnn()

    def loss_fn(params, images, labels):
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def train_step(state, batch, rho=0.05):
        images, labels = batch
        loss, grads = jax.value_and_grad(loss_fn)(state.params, images, labels)
        norm = optax.global_norm(grads)
        moved = jax.tree.map(lambda p, g: p + rho * g / (norm + 1e-12), state.params, grads)
        sharp_loss, grads = jax.value_and_grad(loss_fn)(moved, images, labels)
        state = state.apply_gradients(grads=grads)
        return state, {"loss": loss, "sharpness": sharp_loss - loss, "norm": norm}

    model_inputs = features(8, 8, 3)
    params = model.init(jax.random.key(0), model_inputs)["params"]
    tx = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(0.1, 0.9, nesterov=True))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return PublicStep(train_step, (state, (model_inputs, classes())))


def mixup_cutmix() -> PublicStep:
    """Mixup or cutmix with a permutation of the batch, flips, crops and label smoothing."""
    model = _Cnn()

    def augment(rng, images):
        flip_rng, crop_rng = jax.random.split(rng)
        b, h, w, c = images.shape
        flip = jax.random.bernoulli(flip_rng, shape=(b, 1, 1, 1))
        images = jnp.where(flip, images[:, :, ::-1], images)
        padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
        corners = jax.random.randint(crop_rng, (b, 2), 0, 3)

        def crop(image, at):
            return jax.lax.dynamic_slice(image, (at[0], at[1], 0), (h, w, c))

        return jax.vmap(crop)(padded, corners)

    def mixup(rng, images, targets):
        mix_rng, order_rng = jax.random.split(rng)
        lam = jax.random.beta(mix_rng, 0.8, 0.8)
        order = jax.random.permutation(order_rng, images.shape[0])
        images = lam * images + (1 - lam) * images[order]
        return images, lam * targets + (1 - lam) * targets[order]

    def cutmix(rng, images, targets):
        mix_rng, order_rng, x_rng, y_rng = jax.random.split(rng, 4)
        height, width = images.shape[1:3]
        lam = jax.random.beta(mix_rng, 1.0, 1.0)
        cut = jnp.sqrt(1 - lam) / 2
        x = jax.random.uniform(x_rng) * width
        y = jax.random.uniform(y_rng) * height
        rows = jnp.abs(jnp.arange(height) - y) < cut * height
        columns = jnp.abs(jnp.arange(width) - x) < cut * width
        inside = (rows[:, None] & columns[None])[None, :, :, None]
        order = jax.random.permutation(order_rng, images.shape[0])
        lam = 1 - inside.mean()
        images = jnp.where(inside, images[order], images)
        return images, lam * targets + (1 - lam) * targets[order]

    def train_step(state, batch, rng):
        rng = jax.random.fold_in(rng, state.step)
        augment_rng, kind_rng, mix_rng = jax.random.split(rng, 3)
        images = augment(augment_rng, batch["image"])
        targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)
        images, targets = jax.lax.cond(
            jax.random.bernoulli(kind_rng), mixup, cutmix, mix_rng, images, targets
        )

        def loss_fn(params):
            logits = state.apply_fn(params, images)
            return optax.softmax_cross_entropy(logits, targets).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == jnp.argmax(targets, -1))
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    images = features(8, 8, 3)
    params = model.init(jax.random.key(0), images)
    tx = optax.lamb(1e-3, weight_decay=0.02)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    batch = {"image": images, "label": classes()}
    return PublicStep(train_step, (state, batch, jax.random.PRNGKey(6)))


def segmentation_unet() -> PublicStep:
    """A U-Net: skip connections, transposed convolutions, cross entropy and soft dice."""

    class Unet(nn.Module):
        @nn.compact
        def __call__(self, x):
            skips = []
            for width in (8, 16):
                x = nn.relu(nn.GroupNorm(4)(nn.Conv(width, (3, 3))(x)))
                skips.append(x)
                x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.relu(nn.Conv(32, (3, 3))(x))
            for width, skip in zip((16, 8), skips[::-1], strict=True):
                x = nn.ConvTranspose(width, (2, 2), (2, 2))(x)
                x = jnp.concatenate([x, skip], axis=-1)
                x = nn.relu(nn.GroupNorm(4)(nn.Conv(width, (3, 3))(x)))
            return nn.Conv(3, (1, 1))(x)

    model = Unet()
    tx = optax.adamw(1e-3)

    def train_step(params, opt_state, images, masks):
        def loss_fn(params):
            logits = model.apply(params, images)
            valid = masks != 255
            labels = jnp.where(valid, masks, 0)
            xent = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            xent = jnp.sum(xent * valid) / jnp.sum(valid)
            probabilities = jax.nn.softmax(logits) * valid[..., None]
            one_hot = jax.nn.one_hot(labels, 3) * valid[..., None]
            overlap = jnp.sum(probabilities * one_hot, axis=(1, 2))
            sizes = jnp.sum(probabilities + one_hot, axis=(1, 2))
            dice = 1 - jnp.mean((2 * overlap + 1) / (sizes + 1))
            hits = (jnp.argmax(logits, -1) == labels) & valid
            return xent + dice, {"xent": xent, "dice": dice, "pixels": hits.sum() / valid.sum()}

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, dict(aux, loss=loss)

    images = features(8, 8, 3)
    masks = np.random.default_rng(2).integers(0, 3, (8, 8, 8))
    masks[:, :1] = 255
    params = model.init(jax.random.key(0), images)
    args = (params, tx.init(params), images, jnp.asarray(masks, jnp.int32))
    return PublicStep(train_step, args)


def simclr() -> PublicStep:
    """SimCLR: the two views of each image are each other's positives, all others negatives."""
    encoder, projector = _Cnn(classes=16), nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(8)])
    tx = optax.lars(0.1, weight_decay=1e-6)

    def nt_xent(z, temperature=0.5):
        z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
        similarity = z @ z.T / temperature
        count = z.shape[0]
        similarity = jnp.where(jnp.eye(count, dtype=bool), -9e15, similarity)
        positives = jnp.roll(jnp.arange(count), count // 2)
        log_probs = jax.nn.log_softmax(similarity)
        return -log_probs[jnp.arange(count), positives].mean()

    def train_step(params, opt_state, images, rng):
        rng_1, rng_2 = jax.random.split(rng)
        views = [images + 0.1 * jax.random.normal(r, images.shape) for r in (rng_1, rng_2)]

        def loss_fn(params):
            z = encoder.apply(params["encoder"], jnp.concatenate(views))
            return nt_xent(projector.apply(params["projector"], z))

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    images = features(8, 8, 3)
    params = {
        "encoder": encoder.init(jax.random.key(0), images),
        "projector": projector.init(jax.random.key(1), jnp.ones((1, 16))),
    }
    return PublicStep(train_step, (params, tx.init(params), images, jax.random.key(2)))


def siglip() -> PublicStep:
    """SigLIP: a sigmoid loss over all pairs of images and texts, with a learned bias."""
    image_tower, text_embed, text_tower = _Cnn(classes=16), nn.Embed(32, 16), nn.Dense(16)
    tx = optax.adamw(1e-3)

    def loss_fn(params, images, texts):
        image = image_tower.apply(params["image"], images)
        text = text_tower.apply(params["text"], text_embed.apply(params["embed"], texts).mean(1))
        image /= jnp.linalg.norm(image, axis=-1, keepdims=True) + 1e-8
        text /= jnp.linalg.norm(text, axis=-1, keepdims=True) + 1e-8
        logits = image @ text.T * jnp.exp(params["t"]) + params["b"]
        signs = 2 * jnp.eye(logits.shape[0]) - 1
        return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), axis=-1))

    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["text"])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    texts = jnp.asarray(np.random.default_rng(0).integers(0, 32, (8, 6)), jnp.int32)
    batch = {"image": features(8, 8, 3), "text": texts}
    params = {
        "image": image_tower.init(jax.random.key(0), batch["image"]),
        "embed": text_embed.init(jax.random.key(1), texts),
        "text": text_tower.init(jax.random.key(2), jnp.ones((1, 16))),
        "t": jnp.log(10.0),
        "b": jnp.float32(-10.0),
    }
    return PublicStep(train_step, (params, tx.init(params), batch))


def dp_sgd() -> PublicStep:
    """Private training: each example's gradient is clipped, and noise is added to the sum."""
    model = _Cnn()
    tx = optax.sgd(0.1)
    clip_norm, noise_multiplier = 1.0, 1.1

    def example_loss(params, image, label):
        logits = model.apply(params, image[None])
        return optax.softmax_cross_entropy_with_integer_labels(logits[0], label)

    def clipped_grad(params, image, label):
        loss, grads = jax.value_and_grad(example_loss)(params, image, label)
        norm = optax.global_norm(grads)
        factor = jnp.minimum(1.0, clip_norm / (norm + 1e-6))
        return loss, jax.tree.map(lambda g: g * factor, grads), norm

    def train_step(params, opt_state, rng, images, labels):
        losses, grads, norms = jax.vmap(clipped_grad, (None, 0, 0))(params, images, labels)
        leaves, treedef = jax.tree.flatten(jax.tree.map(lambda g: g.sum(0), grads))
        rng, *keys = jax.random.split(rng, len(leaves) + 1)
        noisy = [
            (g + clip_norm * noise_multiplier * jax.random.normal(key, g.shape)) / len(images)
            for g, key in zip(leaves, keys, strict=True)
        ]
        updates, opt_state = tx.update(jax.tree.unflatten(treedef, noisy), opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, rng, {"loss": losses.mean(), "clipped": (norms > 1).mean()}

    images = features(8, 8, 3)
    params = model.init(jax.random.key(0), images)
    args = (params, tx.init(params), jax.random.PRNGKey(1), images, classes())
    return PublicStep(train_step, args)


def masked_autoencoder() -> PublicStep:
    """MAE: each image keeps a random quarter of its patches; a mean over those removed."""
    patches, kept, width = 16, 4, 16

    class Mae(nn.Module):
        @nn.compact
        def __call__(self, x, rng):
            b = x.shape[0]
            noise = jax.random.uniform(rng, (b, patches))
            shuffle = jnp.argsort(noise, axis=1)
            restore = jnp.argsort(shuffle, axis=1)
            mask = jnp.take_along_axis(
                jnp.broadcast_to(jnp.arange(patches) >= kept, (b, patches)), restore, axis=1
            )
            positions = self.param("pos", nn.initializers.normal(0.02), (1, patches, width))
            h = nn.Dense(width)(x) + positions
            h = jnp.take_along_axis(h, shuffle[:, :kept, None], axis=1)
            token = self.param("cls", nn.initializers.normal(0.02), (1, 1, width))
            h = jnp.concatenate([jnp.tile(token, (b, 1, 1)), h], axis=1)
            h = h + nn.SelfAttention(2)(nn.LayerNorm()(h))
            h = h + nn.Dense(width)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(h))))
            missing = self.param("mask", nn.initializers.normal(0.02), (1, 1, width))
            full = jnp.concatenate([h[:, 1:], jnp.tile(missing, (b, patches - kept, 1))], axis=1)
            full = jnp.take_along_axis(full, restore[:, :, None], axis=1) + positions
            full = full + nn.SelfAttention(2)(nn.LayerNorm()(full))
            return nn.Dense(12)(nn.LayerNorm()(full)), mask.astype(jnp.float32)

    model = Mae()

    def patchify(images):
        b = images.shape[0]
        x = images.reshape(b, 4, 2, 4, 2, 3)
        return jnp.einsum("bhpwqc->bhwpqc", x).reshape(b, patches, 12)

    def train_step(state, images, rng):
        target = patchify(images)
        center, spread = target.mean(-1, keepdims=True), target.var(-1, keepdims=True)
        target = (target - center) / (spread + 1e-6) ** 0.5

        def loss_fn(params):
            predicted, mask = model.apply(params, patchify(images), rng)
            loss = jnp.square(predicted - target).mean(-1)
            return (loss * mask).sum() / mask.sum()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    images, rng = features(8, 8, 3), jax.random.key(1)
    params = model.init(jax.random.key(0), patchify(images), rng)
    tx = optax.adamw(1e-3, b2=0.95, weight_decay=0.05)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return PublicStep(train_step, (state, images, rng))


def dino() -> PublicStep:
    """DINO: a teacher, which is a moving average, with centered and sharpened outputs."""
    encoder = _Cnn(classes=16)
    tx = optax.adamw(1e-3)

    def train_step(state: dict[str, Any], views):
        """Train on views of shape (batch, views, height, width, channels); two are global."""
        b, n = views.shape[:2]
        flat = views.reshape(b * n, *views.shape[2:])

        def loss_fn(student):
            outputs = encoder.apply(student, flat).reshape(b, n, -1)
            teacher = encoder.apply(
                state["teacher"], views[:, :2].reshape(b * 2, *views.shape[2:])
            ).reshape(b, 2, -1)
            targets = jax.nn.softmax((teacher - state["center"]) / 0.04)
            targets = jax.lax.stop_gradient(targets)
            log_probs = jax.nn.log_softmax(outputs / 0.1)
            losses = [
                -(targets[:, i] * log_probs[:, j]).sum(-1).mean()
                for i in range(2)
                for j in range(n)
                if i != j
            ]
            return sum(losses) / len(losses), teacher

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, teacher_out), grads = grad_fn(state["student"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["student"])
        student = optax.apply_updates(state["student"], updates)
        momentum = 1 - 0.004 * (jnp.cos(jnp.pi * state["step"] / 100) + 1) / 2
        ema = partial(jax.tree.map, lambda t, s: momentum * t + (1 - momentum) * s)
        new_state = {
            "student": student,
            "teacher": ema(state["teacher"], student),
            "opt_state": opt_state,
            "center": 0.9 * state["center"] + 0.1 * teacher_out.mean(axis=(0, 1)),
            "step": state["step"] + 1,
        }
        return new_state, loss

    views = features(4, 8, 8, 3)
    student = encoder.init(jax.random.key(0), views[:, 0])
    state = {
        "student": student,
        "teacher": jax.tree.map(lambda x: 0.95 * x, student),
        "opt_state": tx.init(student),
        "center": jnp.zeros(16),
        "step": jnp.int32(3),
    }
    return PublicStep(train_step, (state, views))
