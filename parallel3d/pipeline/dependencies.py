"""What each action of a program waits for: the rules of a pipeline, stated once."""

from parallel3d.pipeline.actions import RECEIVES, SENDS, Action, Op, Program


def receive_of(send: Action) -> Action:
    """The other end of a message: ``1RECV_F3`` of ``0SEND_F3``, ``0RECV_B3`` of ``1SEND_B3``."""
    if send.op is Op.SEND_FORWARD:
        return Action(send.stage + 1, Op.RECV_FORWARD, send.microbatch)
    return Action(send.stage - 1, Op.RECV_BACKWARD, send.microbatch)


def send_of(receive: Action) -> Action:
    """The inverse of ``receive_of``."""
    if receive.op is Op.RECV_FORWARD:
        return Action(receive.stage - 1, Op.SEND_FORWARD, receive.microbatch)
    return Action(receive.stage + 1, Op.SEND_BACKWARD, receive.microbatch)


class Dependencies:
    """Where the actions of a program are, and what each of them needs.

    A program is lowered if it has messages; then a compute needs both ends of the message that
    brings its input, a send needs its receive (a rendezvous), and the receive of a gradient needs
    the send of the activation, which tells its shape. In a compute-only program a compute needs the
    compute that makes its input.
    """

    def __init__(self, program: Program, is_lowered: bool | None = None) -> None:
        self.rank_of = {action: rank for rank, actions in enumerate(program) for action in actions}
        self.home = {action.stage: rank for action, rank in self.rank_of.items()}
        if is_lowered is None:
            is_lowered = any(action.op in SENDS | RECEIVES for action in self.rank_of)
        self.is_lowered = is_lowered

    def input_grad(self, stage: int, microbatch: int) -> Action:
        """What makes the gradient of a stage's input: I where the backward is split, else B."""
        split = Action(stage, Op.INPUT_GRAD, microbatch)
        return split if split in self.rank_of else Action(stage, Op.BACKWARD, microbatch)

    def send_after(self, action: Action) -> Action | None:
        """The SEND of what a compute makes, None if no other rank needs it."""
        stage, op, microbatch = action
        if op is Op.FORWARD and self._is_border(stage, stage + 1):
            return Action(stage, Op.SEND_FORWARD, microbatch)
        if op in (Op.BACKWARD, Op.INPUT_GRAD) and self._is_border(stage, stage - 1):
            return Action(stage, Op.SEND_BACKWARD, microbatch)
        return None

    def receive_before(self, action: Action) -> Action | None:
        """The RECV of what a compute consumes, None if its own rank makes it."""
        stage, op, microbatch = action
        if op is Op.FORWARD and self._is_border(stage, stage - 1):
            return Action(stage, Op.RECV_FORWARD, microbatch)
        if op in (Op.BACKWARD, Op.INPUT_GRAD) and self._is_border(stage, stage + 1):
            return Action(stage, Op.RECV_BACKWARD, microbatch)
        return None

    def needs(self, action: Action) -> list[Action]:
        """The actions that must have been reached before this one can end."""
        stage, op, microbatch = action
        match op:
            case Op.SEND_FORWARD:
                return [Action(stage, Op.FORWARD, microbatch), receive_of(action)]
            case Op.SEND_BACKWARD:
                return [self.input_grad(stage, microbatch), receive_of(action)]
            case Op.RECV_BACKWARD:
                return [Action(stage, Op.SEND_FORWARD, microbatch)]
            case Op.WEIGHT_GRAD:
                return [Action(stage, Op.INPUT_GRAD, microbatch)]
            case Op.FORWARD:
                return self._input(action, Action(stage - 1, Op.FORWARD, microbatch))
            case Op.BACKWARD | Op.INPUT_GRAD:
                gradient = self._input(action, self.input_grad(stage + 1, microbatch))
                return [Action(stage, Op.FORWARD, microbatch), *gradient]
        return []

    def _input(self, action: Action, made_by: Action) -> list[Action]:
        receive = self.receive_before(action)
        if receive is None or not self.is_lowered:
            return [made_by] if made_by.stage in self.home else []
        return [receive, send_of(receive)]

    def _is_border(self, stage: int, neighbour: int) -> bool:
        return neighbour in self.home and self.home[neighbour] != self.home[stage]
