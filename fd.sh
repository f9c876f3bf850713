. /tmp/r1scratch/env.sh; cd /tmp/r1scratch; mkdir -p w7; 
cp all.csv w7/; cd w7
# full disk: ulimit file size and /dev/full
( ulimit -f 100; bo predict ../a.bochner all.csv --out lim.csv 2>&1 | tail -2 ); ls -a | head -20
bo predict ../a.bochner all.csv --out - > /dev/full; 
( ulimit -f 1000;  SROWS=1000 PROWS=500 CROWS=200 bs fit ../A --target y --out lim.bochner $F 2>&1 | tail -2 ); ls -a
# SIGINT / SIGTERM at streaming
for sig in INT TERM; do for s in 4 5.5 7 8; do
 SROWS=1000 PROWS=500 CROWS=200 setsid $PY /tmp/r1scratch/b.py fit ../A --target y --out sig.bochner $F > sig.log 2>&1 & p=$!; 
 $PY -c "import time;time.sleep($s)"; kill -$sig $p; wait $p; echo "$sig $s rc=$? $(tail -1 sig.log)"; ls -a | grep -c sig.bochner; rm -f sig.bochner
done; done
ls -a
