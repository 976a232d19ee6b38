# {"a": ["1 2"], "b": ["16"], "c": [], "lr": ["1e-4"], "seed": ["42"], "x": [], "name": ["my dogs"], "q": ["$LR"], "d": ["$(date +%s)"]}
LR=1e-4
MORE="--lr $LR
  --seed 42"
MORE+=" --x"
NAME='my dogs'
ARGS=(  # what all runs have
  --a "1 2"
  --b ${RANK:-16}
)
ARGS+=(--c)
for i in 1 2; do
  python train.py "${ARGS[@]}" $MORE --name "$NAME" --q '$LR' --d $(date +%s)
done
