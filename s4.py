import subprocess, sys, socket, time, json, signal, os
env={**os.environ,'SROWS':'1000','PROWS':'500','CROWS':'200'}
os.makedirs('w8',exist_ok=True); os.chdir('w8')
for s in (5,6.5,8):
    p=subprocess.Popen([sys.executable,'/tmp/r1scratch/b.py','fit','../A','--target','y','--out','sig.bochner','--hidden=','--kernel','rbf'],env=env,stdout=subprocess.PIPE,stderr=subprocess.PIPE,text=True); time.sleep(s); p.send_signal(signal.SIGINT); o,e=p.communicate(); print('INT',s,p.returncode,e.splitlines()[-1:],os.listdir('.'))
for s in (2.5,3.5,4):
    p=subprocess.Popen([sys.executable,'-m','bochner.cli','predict','../a.bochner','../w5/r.csv','--out','pred.csv'],stdout=subprocess.PIPE,stderr=subprocess.PIPE,text=True); time.sleep(s+4); p.send_signal(signal.SIGINT if s<4 else signal.SIGTERM); o,e=p.communicate(); print('predict',s,p.returncode,e.splitlines()[-1:],os.listdir('.'))
# slow reader
g={'a':0.1,'b':50,'c':'x'}
p=subprocess.Popen([sys.executable,'-m','bochner.cli','serve','../a.bochner','--port','8754'],stdout=subprocess.PIPE,stderr=subprocess.PIPE,text=True); p.stdout.readline()
s=socket.socket(); s.setsockopt(socket.SOL_SOCKET,socket.SO_RCVBUF,4096); s.connect(('127.0.0.1',8754))
b=json.dumps([g]*10000).encode(); s.sendall(b'POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n'%len(b)+b)
o=s.recv(4096); head=o.split(b'\r\n\r\n')[0]; print(head)   # the answer has begun
p.send_signal(signal.SIGTERM); time.sleep(2)
print('server rc so far',p.poll())
try:
    while True:
        x=s.recv(65536)
        if not x: break
        o+=x
except OSError as e: print(repr(e))
L=int([l for l in head.split(b'\r\n') if b'length' in l][0].split(b':')[1]); print('body bytes',len(o)-len(head)-4,'of',L); print(p.wait(70),p.stderr.read()[-200:])
