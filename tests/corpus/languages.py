"""Sentences in many languages, and the encodings in which people have them."""

# Language -> encodings, short texts, a long one.
TEXTS = {
    "Russian": (
        ["KOI8-R", "Windows-1251", "ISO-8859-5", "CP866", "UTF-16LE", "UTF-16BE"],
        ["Привет, мир!", "Меня зовут Анна.", "Глава первая", "Как дела? Всё хорошо.", "МОСКВА"],
        "Вчера вечером мы долго гуляли по берегу реки и разговаривали о том, куда поедем летом. "
        "Брат хотел в горы, сестра мечтала увидеть море, а я думал только о том, что скоро "
        "экзамены. Ёлки на другом берегу уже потемнели, и где-то далеко лаяла собака.\n",
    ),
    "Ukrainian": (
        ["KOI8-U", "Windows-1251", "UTF-16LE"],
        ["Привіт, як справи?", "Мене звати Олена, я живу у Києві.", "Її їжак їсть яблуко."],
        "Учора ввечері ми довго гуляли берегом річки й розмовляли про те, куди поїдемо влітку. "
        "Брат хотів у гори, сестра мріяла побачити море, а я думав лише про те, що скоро іспити. "
        "Її ґудзик загубився десь у траві, і ми шукали його аж до ночі.\n",
    ),
    "Chinese": (
        ["GB18030", "UTF-16LE", "UTF-16BE"],
        ["你好，世界！", "我是一个学生。", "今天天气很好", "第一章 春天", "谢谢你的帮助"],
        "昨天晚上我们沿着河边散步，谈论夏天要去哪里。哥哥想去山里，妹妹梦想着看大海，而我只想着快要考试了。"
        "对岸的树已经暗下来，远处有一只狗在叫。我们走了很久，才回到家里吃饭。\n",
    ),
    "Traditional Chinese": (
        ["BIG5"],
        ["你好，世界！我是學生。", "今天的天氣很好", "謝謝你的幫助"],
        "昨天晚上我們沿著河邊散步，談論夏天要去哪裡。哥哥想去山裡，妹妹夢想著看大海，而我只想著快要考試了。"
        "對岸的樹已經暗下來，遠處有一隻狗在叫。我們走了很久，才回到家裡吃飯。\n",
    ),
    "Japanese": (
        ["SHIFT_JIS", "EUC-JP", "UTF-16LE", "UTF-16BE"],
        [
            "こんにちは、世界。",
            "私は学生です。",
            "吾輩は猫である",
            "ありがとうございます",
            "コンピュータ",
        ],
        "昨日の夕方、私たちは川のそばを長いあいだ散歩しながら、夏にどこへ行くかを話しました。兄は山へ行きたがり、"
        "妹は海を見るのを夢みていましたが、私はもうすぐ試験だということばかり考えていました。\n",
    ),
    "Korean": (
        ["EUC-KR", "UTF-16LE"],
        ["안녕하세요, 세계!", "저는 학생입니다.", "오늘 날씨가 좋네요", "감사합니다", "제1장 봄"],
        "어제 저녁에 우리는 강가를 오래 걸으면서 여름에 어디로 갈지 이야기했다. 형은 산에 가고 싶어 했고, "
        "동생은 바다를 보는 것을 꿈꾸었지만, 나는 곧 시험이 있다는 생각만 하고 있었다.\n",
    ),
    "Polish": (
        ["Windows-1250", "ISO-8859-2"],
        ["Zażółć gęślą jaźń", "Cześć, jak się masz?", "Miło mi cię poznać, dziękuję.", "Łódź"],
        "Wczoraj wieczorem długo spacerowaliśmy brzegiem rzeki i rozmawialiśmy o tym, dokąd "
        "pojedziemy latem. Brat chciał w góry, siostra marzyła, żeby zobaczyć morze, a ja "
        "myślałem tylko o tym, że wkrótce są egzaminy. Gdzieś daleko szczekał pies.\n",
    ),
    "Greek": (
        ["Windows-1253", "ISO-8859-7", "UTF-16LE"],
        ["Γειά σου, κόσμε!", "Με λένε Άννα.", "Τι κάνεις σήμερα;", "ευχαριστώ"],
        "Χθες το βράδυ περπατήσαμε πολλή ώρα δίπλα στο ποτάμι και μιλούσαμε για το πού θα πάμε το "
        "καλοκαίρι. Ο αδελφός μου ήθελε βουνό, η αδελφή μου ονειρευόταν να δει τη θάλασσα, κι εγώ "
        "σκεφτόμουν μόνο ότι σε λίγο έχουμε εξετάσεις.\n",
    ),
    "Turkish": (
        ["Windows-1254"],
        ["Günaydın, nasılsınız?", "Benim adım Ayşe.", "İstanbul'da yaşıyorum.", "Teşekkür ederim"],
        "Dün akşam nehrin kıyısında uzun uzun yürüdük ve yazın nereye gideceğimizi konuştuk. "
        "Ağabeyim dağlara gitmek istiyordu, kız kardeşim denizi görmeyi düşlüyordu, bense yalnızca "
        "yaklaşan sınavları düşünüyordum. Uzakta bir köpek havlıyordu.\n",
    ),
    "Hebrew": (
        ["Windows-1255", "UTF-16LE"],
        ["שלום עולם!", "קוראים לי אנה.", "מה שלומך היום?", "תודה רבה"],
        "אתמול בערב הלכנו זמן רב לאורך הנהר ודיברנו על המקום שאליו ניסע בקיץ. אחי רצה להרים, אחותי "
        "חלמה לראות את הים, ואני חשבתי רק על כך שהבחינות מתקרבות.\n",
    ),
    "Arabic": (
        ["Windows-1256", "ISO-8859-6", "UTF-16LE"],
        ["مرحبا بالعالم!", "اسمي آنا.", "كيف حالك اليوم؟", "شكرا جزيلا"],
        "مشينا مساء أمس طويلا على ضفة النهر وتحدثنا عن المكان الذي سنذهب إليه في الصيف. كان أخي يريد "
        "الجبال، وكانت أختي تحلم برؤية البحر، أما أنا فلم أفكر إلا في الامتحانات القريبة.\n",
    ),
    "French": (
        ["ISO-8859-1", "Windows-1252"],
        [
            "Ça va très bien, merci.",
            "L'été dernier à la plage",
            "Où êtes-vous né ?",
            "C'est déjà noël.",
        ],
        "Hier soir, nous avons longtemps marché au bord de la rivière et nous avons parlé de "
        "l'endroit où nous irions cet été. Mon frère préférait la montagne, ma sœur rêvait de voir "
        "la mer, et moi, je ne pensais qu'à mes examens… « Ça ira », disait-elle.\n",
    ),
    "German": (
        ["ISO-8859-1", "Windows-1252"],
        ["Schöne Grüße aus München", "Ich heiße Jörg.", "Übung macht den Meister", "Straße"],
        "Gestern Abend gingen wir lange am Fluss spazieren und überlegten, wohin wir im Sommer "
        "fahren würden. Mein Bruder wollte in die Berge, meine Schwester träumte vom Meer, und ich "
        "dachte nur an die Prüfungen. „Es wird schön“, sagte sie, „für uns alle.“\n",
    ),
    "Spanish": (
        ["ISO-8859-1"],
        ["¿Cómo estás, señor?", "Mañana será otro día.", "El niño comió una piña"],
        "Ayer por la noche caminamos mucho tiempo junto al río y hablamos de adónde iríamos en "
        "verano. Mi hermano quería ir a la montaña, mi hermana soñaba con ver el mar, y yo sólo "
        "pensaba en que pronto habría exámenes.\n",
    ),
    "Czech": (
        ["Windows-1250", "ISO-8859-2"],
        ["Příliš žluťoučký kůň", "Dobrý den, jak se máte?", "Děkuji, mám se dobře."],
        "Včera večer jsme se dlouho procházeli podél řeky a povídali si o tom, kam pojedeme v létě. "
        "Bratr chtěl do hor, sestra snila o tom, že uvidí moře, a já myslel jen na to, že brzy "
        "budou zkoušky.\n",
    ),
    "Hungarian": (
        ["Windows-1250", "ISO-8859-2"],
        ["Jó napot kívánok, hogy van?", "Köszönöm szépen, jól vagyok.", "Őszinte nő a tűznél"],
        "Tegnap este sokáig sétáltunk a folyóparton, és arról beszélgettünk, hová utazunk nyáron. "
        "A bátyám a hegyekbe akart menni, a húgom arról álmodott, hogy látja a tengert, én pedig "
        "csak arra gondoltam, hogy nemsokára itt vannak a vizsgák.\n",
    ),
    "Lithuanian": (
        ["Windows-1257"],
        [
            "Labas rytas, kaip sekasi?".replace("Labas", "Gražus"),
            "Ačiū, viskas gerai, mano šuo čia.",
        ],
        "Vakar vakare ilgai vaikščiojome palei upę ir kalbėjomės, kur važiuosime vasarą. Brolis "
        "norėjo į kalnus, sesuo svajojo pamatyti jūrą, o aš galvojau tik apie tai, kad greitai "
        "bus egzaminai.\n",
    ),
    "Vietnamese": (
        ["Windows-1258"],
        [],
        "T\u00f4i s\u00f4\u0301ng \u01a1\u0309 Ha\u0300 N\u00f4\u0323i va\u0300 tho\u031bi".replace(
            "\u031b", ""
        )
        + " tie\u0301t h\u00f4m nay \u0111e\u0323p. Ba\u0323n co\u0301 kho\u0309e kh\u00f4ng?\n",
    ),
}
